"""The lesson "Talk to a peer", notebooks/11_talk_to_a_peer.py."""
