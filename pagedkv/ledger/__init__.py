"""Ledgers: what decides.  Plain Python and NumPy; no device, no array of a device."""
