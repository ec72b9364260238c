"""One record a parallel dimension (`pp.py`, `dp.py`, ...), and one package with the code of each."""
