"""The engines that compute attention over packed rows, one module each, and a table of their capabilities."""
