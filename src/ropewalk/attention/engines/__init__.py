"""The engines that compute attention over packed rows, one module each, and what each of them can do."""
