"""The session: the commit line, transactions, documents, transcripts."""
