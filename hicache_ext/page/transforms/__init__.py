"""What happens to a page between host memory and a medium: it may be encoded (codec.py), and then sealed (sealing.py).

A transformed page is the payload of an ordinary page object under a key of its own (forms.py), so that every medium
keeps it, checks it and gives it back as it does any other page. docs/page-format.md specifies the bytes.
"""
