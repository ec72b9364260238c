"""The plan: what every rank computes, and how a model is split into pipeline stages. No torch."""
