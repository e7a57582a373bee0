"""The web console: one page on loopback that shows a run live and steers it."""
