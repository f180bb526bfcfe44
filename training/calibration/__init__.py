"""From evaluation rows to a certificate: scores, temperatures, limits, looks, keys, pictures."""
