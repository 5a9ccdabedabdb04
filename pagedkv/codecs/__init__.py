"""The reference codecs of the five storage profiles, in NumPy.  (codecs.md)"""
