"""Examples to copy; run by CI."""
