"""Build figures by subject from plain results. ``reporting.drawing`` draws them."""
