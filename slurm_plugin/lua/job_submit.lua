-- TorchPass on the controller: adds the spare nodes to a request. For sites that decide there, and for requests that come
-- through no command of Slurm's, such as slurmrestd's:
--
--     "spank_environment": ["TORCHPASS_SPARES=2"], "kill_on_node_fail": false
--
-- In slurm.conf: JobSubmitPlugins=lua. Where the site has a job_submit.lua already, keep that, and add
--     dofile("/usr/local/share/torchpass/lua/job_submit.lua")                    at its beginning
--     local rc = torchpass_job_submit(job); if rc ~= slurm.SUCCESS then return rc end      in its slurm_job_submit
--
-- What sbatch, salloc or srun enlarged says so (TORCHPASS_ENLARGED) and is left alone; with enlarge=job_submit in
-- plugstack.conf they leave it to this script. Lua cannot set no-kill: the plugin does, or the request says it itself.

-- The value of NAME=... in what SPANK plugins told the controller.
local function told(job, name)
  for _, entry in pairs(job.spank_job_env or {}) do
    local found = string.match(entry, "^" .. name .. "=(.*)$")
    if found then return found end
  end
  return nil -- said aloud: tonumber refuses no value at all
end

-- "gres:gpu:" and "a100:8" of "gres:gpu:a100:8" (22.05) or "gres/gpu:a100:8" (24.11); nil where it is anything else.
local function gpus_of(tres)
  if not tres or tres == "" then return "", "" end
  return string.match(tres, "^(gres[:/]gpu[:=])([^,]+)$")
end

function torchpass_job_submit(job)
  local spares = tonumber(told(job, "TORCHPASS_SPARES"))
  if not spares or spares < 1 or told(job, "TORCHPASS_ENLARGED") then return slurm.SUCCESS end

  local function refuse(sentence)
    slurm.log_user("torchpass: %s", sentence)
    return slurm.ERROR
  end
  local function number(value, none) return value and value ~= none and value or 0 end

  local nodes, most = number(job.min_nodes, slurm.NO_VAL), number(job.max_nodes, slurm.NO_VAL)
  local tasks, each = number(job.num_tasks, slurm.NO_VAL), number(job.ntasks_per_node, slurm.NO_VAL16)
  local prefix, gpus = gpus_of(job.tres_per_job)
  if not gpus then
    return refuse("a total of " .. job.tres_per_job .. " cannot be enlarged; ask for it per node instead")
  end
  local sizes, sentence = torchpass_enlarge({
    nodes_given = nodes > 0,
    min_nodes = nodes,
    max_nodes = most,
    -- Slurm's commands count tasks themselves where there is --ntasks-per-node; that count says nothing new.
    tasks_given = tasks > 0 and not (each > 0 and tasks == each * nodes),
    tasks_sent = tasks > 0,
    tasks = tasks,
    tasks_per_node = each,
    tasks_per_gpu = number(job.ntasks_per_tres, slurm.NO_VAL16) > 0,
    gpus = gpus,
    gpus_placed = string.find((job.tres_per_node or "") .. (job.tres_per_socket or "") .. (job.tres_per_task or ""), "gpu")
      ~= nil,
    segment = number(job.segment_size, slurm.NO_VAL16),
  }, spares)
  if not sizes then return refuse(sentence) end

  local cpus = number(job.min_cpus, slurm.NO_VAL)
  if cpus > 0 then job.min_cpus = math.ceil(cpus / (sizes.min_nodes - spares) * sizes.min_nodes) end
  job.min_nodes = sizes.min_nodes
  job.max_nodes = sizes.max_nodes
  if sizes.tasks then job.num_tasks = sizes.tasks end
  if sizes.tasks_per_node then job.ntasks_per_node = sizes.tasks_per_node end
  if sizes.gpus then job.tres_per_job = prefix .. sizes.gpus end
  if sizes.gpus_per_node then
    local others = job.tres_per_node
    job.tres_per_node = (others and others ~= "" and others .. "," or "") .. prefix .. sizes.gpus_per_node
  end
  if job.script then job.environment["TORCHPASS_SPARES"] = string.format("%d", spares) end
  return slurm.SUCCESS
end

slurm_job_submit = slurm_job_submit or function(job) return torchpass_job_submit(job) end
slurm_job_modify = slurm_job_modify or function() return slurm.SUCCESS end
