"""Tool calls: which tools a request has, and how calls, reasoning and content are read from a text as it comes."""
