"""The prefix store: hashes, spans, tree, policies. No torch; its face is `store.PrefixCache`."""
