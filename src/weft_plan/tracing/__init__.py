"""Measured steps beside predicted ones: what `weft trace` says and draws."""
