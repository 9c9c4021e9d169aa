"""How a node's machine reacts to each request, by who sends it: functions without effects."""
