"""Dependency proxies: parameters, gradients and modules that wait. They know no plan."""
