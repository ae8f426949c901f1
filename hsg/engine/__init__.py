"""How many rows run through a transformer: sampling with a kept cache, packed updates.

    generation (decoding)   cache   attention   layout and packing (rows without padding)   precision   seeds
Whatever is fast here has a slow twin that the tests compare it with.
"""
