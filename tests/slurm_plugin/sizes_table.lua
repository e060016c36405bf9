-- As sizes_table.c, for sizes.lua, which stands in front of this.
for line in io.lines() do
  local asked = {
    min_nodes = 1, max_nodes = 0, tasks = 1, tasks_per_node = 0, gpus = "", segment = 0, spares = 1,
    nodes_given = false, size_list = false, tasks_given = false, tasks_sent = false, tasks_per_gpu = false,
    gpus_placed = false, arbitrary = false, step = false,
  }
  for name, text in string.gmatch(line, "(%S+)=(%S+)") do
    if type(asked[name]) == "boolean" then
      asked[name] = text == "1"
    elseif type(asked[name]) == "number" then
      asked[name] = tonumber(text)
    else
      asked[name] = text
    end
  end
  local sizes, sentence = torchpass_enlarge(asked, asked.spares)
  if sizes then
    print(string.format('{"min_nodes": %d, "max_nodes": %d, "tasks": %d, "tasks_per_node": %d, "gpus": "%s", '
      .. '"gpus_per_node": "%s"}', sizes.min_nodes, sizes.max_nodes, sizes.tasks or 0, sizes.tasks_per_node or 0,
      sizes.gpus or "", sizes.gpus_per_node or ""))
  else
    print(sentence)
  end
  io.stdout:flush()
end
