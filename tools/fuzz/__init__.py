"""`pagedkv fuzz`: random walks over a store beside a slow model of the contract, with everything compared."""
