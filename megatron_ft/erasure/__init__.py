"""Erasure coding of sealed shards over MPI: stripes, codecs, encode, rebuild, verify."""
