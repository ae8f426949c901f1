"""What `hsg view` puts into its page: run folders as compact data (folder.py), strategy maps (maps.py), the page's files.

Deliberately absent: a server, a build step, anything fetched from a network.
"""
