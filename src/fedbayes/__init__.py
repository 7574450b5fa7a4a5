"""Bayesian federated learning: any PyTorch network, trained across clients that keep their data, becomes a posterior."""
