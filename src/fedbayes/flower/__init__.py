"""The same experiment on other machines: rounds carried by Flower. No other room imports `flwr`."""
