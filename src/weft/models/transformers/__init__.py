"""Any decoder of transformers as a family: `hf:olmo2`, or a folder of an architecture that weft has no family for."""
