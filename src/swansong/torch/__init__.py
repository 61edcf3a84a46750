"""Adapter for PyTorch: optimizers, modules, data loaders, torchrun."""
