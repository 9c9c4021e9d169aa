"""Erasure coding of sealed shards over MPI or TCP: stripes, codecs, encode, rebuild, verify."""
