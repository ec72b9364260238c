"""Communication between ranks: `Comm` by mesh-axis name, over one of several transports."""
