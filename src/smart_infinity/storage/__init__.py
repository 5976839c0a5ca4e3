"""A device's storage: files, slots, the ledger, and the transfer handler. No torch in here."""
