"""Report of runs: what their folders record, as a page, as pictures and as a table. No torch."""
