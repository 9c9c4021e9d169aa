"""Parts that tests and the demo share with users: a stand-in device, a small training program."""
