"""One stripe's encode and rebuild over real transports: how fast, how many bytes, where."""
