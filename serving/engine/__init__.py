"""Continuous batching: requests of many adapters share every forward."""
