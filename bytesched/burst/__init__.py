"""Bursts: every layer on as many devices as it scales to, another job on what that leaves idle.

The planner and the arithmetic of idle time. It imports no framework; `bytesched.plugins.burst`
runs a plan. After DeepPool (Park et al., "Efficient Strong Scaling Through Burst Parallel
Training", MLSys 2022).
"""
