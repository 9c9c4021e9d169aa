"""What processes say to each other: messages, sockets, keys, the page of heartbeats."""
