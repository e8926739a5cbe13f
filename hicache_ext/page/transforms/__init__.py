"""Transforms of a page between host memory and a medium: encoding (codec.py), then sealing (sealing.py), both optional.

A transformed page is the payload of an ordinary page object under a separate key (forms.py), so that every medium
stores, checks and returns it like any other page. docs/page-format.md specifies the bytes.
"""
