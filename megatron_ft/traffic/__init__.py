"""Windows of training in which background traffic of the node keeps still.

A trainer marks a window in a page of the node's folder (``word.py``; its side is
``capture/quiet.py``); whoever moves bytes in the background looks there before each block
(``gate.py``).
"""
