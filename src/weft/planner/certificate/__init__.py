"""The typed certificate: the type of every tensor of a step along each mesh axis, from the real code on the meta device."""
