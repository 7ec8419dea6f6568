"""labkit"""
