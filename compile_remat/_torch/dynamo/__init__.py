"""The way from Dynamo to graphs: frames that it has tried, and the sizes that it saw first.  Makes no decisions."""
