-- How large a request must be so that spare nodes come on top of it: sizes.c again, for the scripts that run inside of
-- Slurm, with the same refusals (tests/slurm_plugin/test_sizes.py runs one table on both). `make` puts it in front of
-- cli_filter.lua and job_submit.lua, since Slurm ships only a single file to its clients.

local MOST = 2147483647 -- of anything that Slurm counts

-- asked: nodes_given, min_nodes, max_nodes (0: open), size_list, tasks_given, tasks_sent, tasks, tasks_per_node (0: not
-- given), tasks_per_gpu, gpus (text, "": not given), gpus_placed, segment (0: not given), arbitrary, step (srun).
-- Returns {min_nodes, max_nodes, tasks, tasks_per_node, gpus, gpus_per_node}, absent where nothing changes; or nil and
-- one sentence that says why not and what to write.
local function torchpass_enlarge(asked, spares)
  local function no(format, ...) return nil, string.format(format, ...) end
  local function scale(total, nodes, wanted)
    local scaled = total / nodes * wanted
    return scaled <= MOST and scaled or nil
  end
  local function fits(nodes) return asked.segment <= 0 or nodes <= asked.segment or nodes % asked.segment == 0 end

  local nodes, last = asked.min_nodes, asked.max_nodes
  if spares < 1 or spares > MOST then return no("%s is no number of spare nodes; write 1 or more", spares) end
  if asked.arbitrary then
    return no("--distribution=arbitrary places every task by hand, the spares' too; leave it away, or ask for the nodes "
      .. "yourself and write TORCHPASS_SPARES=N srun")
  end
  if asked.size_list then
    return no("-N with a list of node counts cannot be enlarged; write one number or MIN-MAX")
  end
  if not asked.nodes_given then
    if asked.tasks_given and asked.tasks_per_node > 0 then
      if asked.tasks % asked.tasks_per_node ~= 0 then
        return no("-n %d does not fill its last node with --ntasks-per-node=%d; write -N NODES --ntasks-per-node=%d "
          .. "without -n", asked.tasks, asked.tasks_per_node, asked.tasks_per_node)
      end
      nodes = asked.tasks / asked.tasks_per_node
    elseif asked.tasks_given and asked.tasks > 1 then
      return no("-n %d alone does not say how many nodes train; write -N NODES --ntasks-per-node=TASKS instead",
        asked.tasks)
    elseif asked.gpus ~= "" and asked.gpus ~= "1" then
      return no("--gpus=%s alone does not say how many nodes train; write -N NODES --gpus-per-node=GPUS instead",
        asked.gpus)
    else
      nodes = 1
    end
    last = nodes
  end
  if last == 0 then last = nodes end
  if nodes < 1 or last < nodes then
    return no("there is no training node in -N %d-%d; write -N 1 or more", nodes, last)
  end
  if last > MOST - spares then
    return no("with the spares these are more nodes than Slurm can count; write smaller numbers")
  end
  local range = last ~= nodes
  if range and asked.step then
    return no("srun lays its tasks out for one number of nodes; write -N %d, or use sbatch or salloc for a range", nodes)
  end
  local sizes = { min_nodes = nodes + spares, max_nodes = last + spares }
  if not (fits(sizes.min_nodes) and fits(sizes.max_nodes)) then
    return no("%d nodes and %d spares are not whole segments of %d nodes; write --torchpass-spares=%d, or leave "
      .. "--segment away", nodes, spares, asked.segment,
      spares + (asked.segment - sizes.min_nodes % asked.segment) % asked.segment)
  end

  if asked.tasks_given or asked.tasks_sent then
    if asked.tasks_given and range then
      return no("-n %d with a range of nodes leaves the tasks of a node open; write --ntasks-per-node=TASKS instead of "
        .. "-n", asked.tasks)
    end
    if asked.tasks < 1 or asked.tasks % nodes ~= 0 then
      return no("-n %d is not a multiple of the %d nodes that train; write --ntasks-per-node=TASKS instead of -n",
        asked.tasks, nodes)
    end
    local each = asked.tasks / nodes
    if asked.tasks_given and asked.tasks_per_node > 0 and asked.tasks_per_node ~= each then
      return no("-n %d on %d nodes is %d tasks a node, but --ntasks-per-node says %d; leave -n away", asked.tasks, nodes,
        each, asked.tasks_per_node)
    end
    if asked.tasks_given and asked.tasks_per_gpu then
      return no("-n %d with --ntasks-per-gpu counts tasks twice; write -N %d --gpus-per-node=GPUS --ntasks-per-gpu=TASKS "
        .. "without -n", asked.tasks, nodes)
    end
    if asked.tasks_given and asked.tasks_per_node == 0 then sizes.tasks_per_node = each end
    sizes.tasks = scale(asked.tasks, nodes, sizes.min_nodes)
    if not sizes.tasks then
      return no("with the spares these are more tasks than Slurm can count; write smaller numbers")
    end
  end

  if asked.gpus ~= "" then
    local kind, count = string.match(asked.gpus, "^([^,]*:)(%d+)$")
    if not kind then kind, count = "", string.match(asked.gpus, "^(%d+)$") end
    count = tonumber(count)
    if not count or count < 1 or count > MOST or #kind >= 48 then
      return no("--gpus=%.60s is not one number of GPUs; write --gpus-per-node=GPUS instead", asked.gpus)
    end
    if range then
      return no("--gpus=%s with a range of nodes leaves the GPUs of a node open; write --gpus-per-node=GPUS instead",
        asked.gpus)
    end
    if count % nodes ~= 0 then
      return no("--gpus=%s is not a multiple of the %d nodes that train; write --gpus-per-node=GPUS instead", asked.gpus,
        nodes)
    end
    local scaled = scale(count, nodes, sizes.min_nodes)
    if not scaled then
      return no("with the spares these are more GPUs than Slurm can count; write smaller numbers")
    end
    sizes.gpus = string.format("%s%d", kind, scaled)
    if not asked.gpus_placed then sizes.gpus_per_node = string.format("%s%d", kind, count / nodes) end
  end
  return sizes
end
