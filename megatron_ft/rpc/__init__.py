"""Communication between processes: messages, sockets, keys, the page of heartbeats."""
