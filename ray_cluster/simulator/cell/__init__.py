"""Experiments on replicas of one device each."""
