"""Functions that plain scripts call, which choose between the layers below."""
