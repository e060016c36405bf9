-- TorchPass on the submitting host, through documented interfaces only: adds the spare nodes of --torchpass-spares to a
-- request. For sites that do not want the SPANK plugin to touch Slurm's option table; in plugstack.conf:
--
--     optional /usr/local/lib/torchpass/torchpass.so enlarge=cli_filter
--
-- and in slurm.conf: CliFilterPlugins=cli_filter/lua. Where the site has a cli_filter.lua already, keep that, and add
--     dofile("/usr/local/share/torchpass/lua/cli_filter.lua")                    at its beginning
--     local rc = torchpass_pre_submit(options); if rc ~= slurm.SUCCESS then return rc end      in its pre_submit
--
-- The plugin says who enlarges (TORCHPASS_ENLARGED), so that nothing is ever enlarged twice.

function torchpass_pre_submit(options)
  local plugin = options["spank"]["torchpass"]
  local spares = plugin and tonumber(plugin["torchpass-spares"])
  if not spares or spares < 1 or os.getenv("TORCHPASS_ENLARGED") ~= "cli_filter" then return slurm.SUCCESS end

  local function refuse(sentence)
    slurm.log_error("torchpass: %s", sentence)
    return slurm.ERROR
  end
  local set = slurm.json_cli_options(options)
  local function given(name) return string.find(set, '"' .. string.gsub(name, "%-", "%%-") .. '"%s*:') ~= nil end
  local function text(name) return given(name) and options[name] or "" end

  if options["type"] == "srun" and (os.getenv("SLURM_JOB_ID") or given("jobid")) then return slurm.SUCCESS end
  if not given("nodes") and (given("nodelist") or given("nodefile")) then
    return refuse("a list of nodes without -N is no number of nodes; write -N NODES, too")
  end
  local low, high = string.match(text("nodes"), "^(%d+)%-?(%d*)$")
  local sizes, sentence = torchpass_enlarge({
    nodes_given = given("nodes"),
    min_nodes = tonumber(low) or 1,
    max_nodes = tonumber(high) or tonumber(low) or 1,
    tasks_given = given("ntasks"),
    tasks = tonumber(options["ntasks"]) or 1,
    tasks_per_node = tonumber(text("ntasks-per-node")) or 0,
    tasks_per_gpu = given("ntasks-per-gpu") or given("ntasks-per-tres"),
    gpus = text("gpus"),
    gpus_placed = given("gpus-per-node") or given("gpus-per-socket") or given("gpus-per-task")
      or string.find(text("gres"), "gpu") ~= nil,
    segment = tonumber(text("segment")) or 0,
    step = options["type"] == "srun",
    arbitrary = string.find(text("distribution"), "^arbitrary") ~= nil,
  }, spares)
  if not sizes then return refuse(sentence) end

  if sizes.min_nodes == sizes.max_nodes then
    options["nodes"] = string.format("%d", sizes.min_nodes)
  else
    options["nodes"] = string.format("%d-%d", sizes.min_nodes, sizes.max_nodes)
  end
  if sizes.tasks then options["ntasks"] = string.format("%d", sizes.tasks) end
  if sizes.tasks_per_node then options["ntasks-per-node"] = string.format("%d", sizes.tasks_per_node) end
  if sizes.gpus then options["gpus"] = sizes.gpus end
  if sizes.gpus_per_node then options["gpus-per-node"] = sizes.gpus_per_node end
  options["no-kill"] = "set" -- the plugin looks for it: it tells that this script ran
  slurm.log_info("torchpass: %d nodes, %d of them spares", sizes.max_nodes, spares)
  return slurm.SUCCESS
end

slurm_cli_setup_defaults = slurm_cli_setup_defaults or function() return slurm.SUCCESS end
slurm_cli_pre_submit = slurm_cli_pre_submit or function(options) return torchpass_pre_submit(options) end
slurm_cli_post_submit = slurm_cli_post_submit or function() return slurm.SUCCESS end
