"""How Dynamo comes to graphs: which frames it has tried, and the sizes that it saw first.  No decision of ours lives here."""
