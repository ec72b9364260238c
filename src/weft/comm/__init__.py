"""Collectives and messages between ranks: `Comm`, addressed by mesh axis, over interchangeable transports."""
