"""A model whose stages visit every rank."""
