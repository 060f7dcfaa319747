"""Real processes on free loopback ports, and what the suites need to talk to them."""
