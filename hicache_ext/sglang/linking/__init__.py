"""The parts of the external linker: staging memory, writing, reading, what ranks agree on. linker.py is their door."""
