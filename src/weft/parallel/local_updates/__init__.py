"""Local updates over the site axis: outer parameters, their exchange between sites, and the outer optimizer."""
