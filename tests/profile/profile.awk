# SPDX-License-Identifier: MIT
# Makes tool output readable for tests/profile/profile.sh. -v what= is one of
#
#     sass      reads `cuobjdump --dump-resource-usage`, then `cuobjdump -sass`: a line per kernel, exit 1 if one FAILs
#     cfg       reads `nvdisasm -bbcfg`: writes a .dot file for each kernel to the folder -v into=, and prints a line
#     table     reads the plan of build/ncu/profile, then ncu's raw page as CSV: a table and a checklist, exit 1 if a
#               line says NOT
#     compare   reads two such files
#
# The first row of ncu's CSV names the columns, the second their units; then each kernel has a row. Several such tables
# may follow each other. A plan's line is `# operation|kernel|bytes moved|kind`, in the order in which kernels run.

# Turns _Z11kvpn_kernelI13kvpn_one_shotLi8ELb1EEv... into kvpn_kernel<kvpn_one_shot,8,1>.
function short_name(mangled, name, arguments)
{
    rest = substr(mangled, 3)
    if (mangled !~ /^_Z[0-9]/)
        return mangled
    name = counted_name()
    if (rest !~ /^I/)
        return name
    rest = substr(rest, 2)
    while (rest != "" && rest !~ /^E/)
        arguments = arguments (arguments == "" ? "" : ",") argument()
    return name "<" arguments ">"
}

# Takes the name at the start of `rest`, and the length before it, off `rest`.
function counted_name(length_of, name)
{
    length_of = rest + 0
    sub(/^[0-9]+/, "", rest)
    name = substr(rest, 1, length_of)
    rest = substr(rest, length_of + 1)
    return name
}

function argument(value)
{
    if (rest ~ /^[0-9]/)
        return counted_name()
    value = substr(rest, 1, 1)
    rest = substr(rest, 2)
    if (value != "L")
        return value == "j" ? "u32" : value == "m" ? "u64" : value
    if (rest ~ /^[0-9]/) # an enum's value
        counted_name()
    else
        rest = substr(rest, 2)
    value = rest
    sub(/E.*/, "", value)
    sub(/^[^E]*E/, "", rest)
    return value
}

# ---- sass ----

# Returns the operation whose main path a kernel is, for data in whole 16-byte words, or "".
function main_path(mangled)
{
    if (mangled ~ /kvpc_(gather|store)_kernelI(Lj[0-9]+E)+Lb1E/)
        return mangled ~ /gather/ ? "gather" : "store"
    if (mangled ~ /kvpc_move(_few)?_kernel/)
        return "transfer"
    if (mangled ~ /kvpc_unpack_kernelI[^E]*ELb1E/)
        return "unpack"
    if (mangled ~ /kvpn_kernelI13kvpn_(one|two)_shot[^E]*ELb1E/)
        return "all_reduce"
    if (mangled ~ /kvpn_kernelI12kvpn_scatter[^E]*ELb1E/)
        return "scatter"
    return mangled ~ /kvpn_kernelI16kvpn_gather_many[^E]*ELb1E/ ? "gather_many" : ""
}

what == "sass" && $1 == "Function" && $2 != ":" { sub(/:$/, "", $2); resources = $2 }
what == "sass" && /^ *REG:/ {
    for (i = 1; i <= NF; i++) {
        split($i, pair, ":")
        usage[resources, pair[1]] = pair[2]
    }
}
what == "sass" && $1 == "Function" && $2 == ":" { kernel = $3; kernels[++kernel_count] = kernel }
what == "sass" && kernel != "" && match($0, /[ \t](LDG|STG|LDL|STL|LD|ST)[. ][A-Z0-9.]*/) {
    split(substr($0, RSTART + 1, RLENGTH - 1), op, ".")
    instruction = op[1]
    sub(/ .*/, "", instruction)
    width = substr($0, RSTART + 1, RLENGTH - 1) ~ /\.(128|256)(\.|$)/ ? "wide" : "narrow"
    uses[kernel, instruction, width]++
    if (instruction == "LDG" && substr($0, RSTART + 1, RLENGTH - 1) ~ /\.[US](8|16)(\.|$)/)
        uses[kernel, "bytes"]++
}

function used(kernel, instruction)
{
    return uses[kernel, instruction, "wide"] + uses[kernel, instruction, "narrow"]
}

# Says what is wrong with a kernel. Narrower loads of a main path are of indices and descriptors, 32 or 64 bits each.
# One of the collectives also stores which half of its slots is next and, wherever it waits, that the wait failed: to
# the host and to its own GPU.
function sass_fault(kernel, path)
{
    if (usage[kernel, "REG"] == "")
        return "registers unknown"
    if (usage[kernel, "STACK"] + usage[kernel, "LOCAL"] + used(kernel, "LDL") + used(kernel, "STL") > 0)
        return "local memory"
    if (used(kernel, "LD") + used(kernel, "ST") > 0)
        return "generic accesses"
    if (path == "")
        return ""
    if (!uses[kernel, "LDG", "wide"] || !uses[kernel, "STG", "wide"])
        return "no 128-bit accesses"
    if (uses[kernel, "STG", "narrow"] > (kernel !~ /kvpn_kernel/ ? 0 : kernel ~ /two_shot/ ? 5 : 3))
        return "narrow stores"
    return uses[kernel, "bytes"] > 0 ? "narrow loads" : ""
}

function print_sass(k, kernel, path, fault, faults, found, name)
{
    printf "%4s %5s %6s  %-11s %-11s\n", "", "", "", "loads", "stores"
    printf "%4s %5s %6s  %5s %5s %5s %5s  %-10s\n", "regs", "stack", "spills", "128", "less", "128", "less", "main path"
    for (k = 1; k <= kernel_count; k++) {
        kernel = kernels[k]
        path = main_path(kernel)
        fault = sass_fault(kernel, path)
        name = short_name(kernel)
        found[path]++
        faults += fault != ""
        printf "%4s %5s %6d  %5d %5d %5d %5d  %-10s %-4s %s%s\n", usage[kernel, "REG"], usage[kernel, "STACK"],
            used(kernel, "LDL") + used(kernel, "STL"), uses[kernel, "LDG", "wide"], uses[kernel, "LDG", "narrow"],
            uses[kernel, "STG", "wide"], uses[kernel, "STG", "narrow"], path == "" ? "-" : path,
            fault == "" ? "ok" : "FAIL", name, fault == "" ? "" : ": " fault
        if (name ~ /^kvpc_/)
            expected = "gather store transfer unpack " expected
        if (name ~ /^kvpn_/)
            expected = "all_reduce scatter gather_many " expected
    }
    path_count = split(expected, paths)
    for (k = 1; k <= path_count; k++)
        if (!found[paths[k]]++) {
            print "FAIL no kernel is the main path of " paths[k]
            faults++
        }
    printf "%d kernels, %d of them main paths: %d FAIL\n", kernel_count, kernel_count - found[""], faults
    return faults > 0 || kernel_count == 0
}

# ---- cfg ----

function file_name(kernel, name)
{
    name = short_name(kernel)
    gsub(/>/, "", name)
    gsub(/[^A-Za-z0-9_]+/, "_", name)
    return into "/" name ".dot"
}

what == "cfg" && /^subgraph "cluster_/ {
    kernel = $2
    sub(/^"cluster_/, "", kernel)
    sub(/"$/, "", kernel)
    dot = file_name(kernel)
    print "digraph kernel {" > dot
    entry = ""
    blocks = edges = 0
    next
}
what == "cfg" && kernel != "" { print > dot }
what == "cfg" && kernel != "" && /^"[^"]*"$/ {
    blocks++
    if (entry == "")
        entry = $0
}
what == "cfg" && kernel != "" && / -> / {
    from = to = $0
    sub(/":.*/, "\"", from)
    sub(/.* -> /, "", to)
    sub(/":.*/, "\"", to)
    following[from, ++degree[from]] = to
    edges++
}
what == "cfg" && kernel != "" && /^}/ {
    close(dot)
    back_edges = loops = 0
    search(entry)
    printf "%5d %5d %10d %5d  %s\n", blocks, edges, back_edges, loops, dot
    kernel_count++
    kernel = ""
    split("", following)
    split("", degree)
    split("", state)
    split("", heads)
}

# Searches depth first. An edge to a block that is still being searched is a back edge; it ends at the head of a loop.
function search(block, k, to)
{
    state[block] = 1
    for (k = 1; k <= degree[block]; k++) {
        to = following[block, k]
        if (state[to] == 1) {
            back_edges++
            loops += !heads[to]++
        } else if (!state[to])
            search(to)
    }
    state[block] = 2
}

# ---- ncu ----

# Converts to seconds and bytes.
function scale(unit)
{
    return unit ~ /^(s|second|byte)/ || unit !~ /^[numkKMGT](s|second|byte)/ ? 1 : \
        unit ~ /^n/ ? 1e-9 : unit ~ /^u/ ? 1e-6 : unit ~ /^m/ ? 1e-3 : unit ~ /^[kK]/ ? 1e3 : unit ~ /^M/ ? 1e6 : \
        unit ~ /^G/ ? 1e9 : 1e12
}

function base_name(kernel)
{
    sub(/^void /, "", kernel)
    sub(/[<(].*/, "", kernel)
    return kernel
}

# Reads one table: the plan's lines and ncu's rows. If two files are compared, row numbers go on in the second.
what == "table" || what == "compare" {
    if (FNR == 1)
        file++
    sub(/\r$/, "")
}
/^# SPDX/ { # of the recorded plan
    next
}
(what == "table" || what == "compare") && /^# / {
    split(substr($0, 3), f, "|")
    plan = ++planned[file]
    operation[file, plan] = f[1]
    expected_kernel[file, plan] = f[2]
    bytes[file, plan] = f[3]
    kind[file, plan] = f[4]
}
(what == "table" || what == "compare") && /^"/ {
    sub(/^"/, "")
    sub(/"$/, "")
    columns = split($0, f, "\",\"")
    if (f[1] == "ID") {
        for (c = 1; c <= columns; c++)
            column[c] = f[c]
        next
    }
    if (f[1] == "") {
        for (c = 1; c <= columns; c++)
            factor[c] = scale(f[c])
        next
    }
    row = ++rows[file]
    for (c = 1; c <= columns; c++) {
        if (column[c] == "Kernel Name")
            kernel_of[file, row] = base_name(f[c])
        gsub(/,/, "", f[c])
        if (f[c] ~ /^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$/)
            keep(column[c], f[c] * factor[c])
    }
}

# The table's figures, by ncu's names.
function keep(name, value, stall)
{
    if (name == "gpu__time_duration.sum")
        set("time, us", value * 1e6)
    else if (name == "dram__bytes.sum.per_second")
        set("DRAM, GB/s", value * 1e-9)
    else if (name == "dram__throughput.avg.pct_of_peak_sustained_elapsed")
        set("DRAM, % of peak", value)
    else if (name == "sm__warps_active.avg.pct_of_peak_sustained_active")
        set("occupancy, %", value)
    else if (name == "sm__maximum_warps_per_active_cycle_pct")
        set("of at most, %", value)
    else if (name == "launch__registers_per_thread")
        set("registers", value)
    else if (name ~ /^smsp__inst_executed_op_local_(ld|st)\.sum$/)
        set("local accesses", figure[file, row, "local accesses"] + value)
    else if (name ~ /^smsp__average_warps_issue_stalled_.*_per_issue_active\.ratio$/) {
        stall = substr(name, length("smsp__average_warps_issue_stalled_") + 1)
        sub(/_per_issue_active\.ratio$/, "", stall)
        if (stall != "selected" && stall !~ /not_issued$/) # selected means not stalled
            add_stall(stall, value)
    }
}

function set(name, value)
{
    figure[file, row, name] = value
    has[file, row, name] = 1
}

function add_stall(stall, value)
{
    stalls[file, row] += value
    if (value > stalled[file, row])
        stalled[file, row] = value
    if (value == stalled[file, row])
        dominating[file, row] = stall
    if (stall == "long_scoreboard")
        long_scoreboard[file, row] = value
    if (stalls[file, row] > 0) {
        set("stall's share, %", 100 * stalled[file, row] / stalls[file, row])
        set("long scoreboard, %", 100 * long_scoreboard[file, row] / stalls[file, row])
    }
}

function shown(f, r, name, format)
{
    return has[f, r, name] ? sprintf(format, figure[f, r, name]) : "-"
}

# Counts all bytes that a kernel is asked to move, read and written.
function moved(r)
{
    return figure[1, r, "time, us"] > 0 ? bytes[1, r] / figure[1, r, "time, us"] * 1e-3 : 0
}

function print_table(r, form)
{
    form = "%-36s %8s %6s %6s %6s  %-15s %4s %5s %5s %5s %5s\n"
    printf form, "", "", "moved", "DRAM", "of", "dominating", "", "occu-", "of at", "", "local"
    printf form, "operation", "us", "GB/s", "GB/s", "peak", "stall", "", "pancy", "most", "regs", "ld+st"
    for (r = 1; r <= rows[1]; r++)
        printf form, (r > planned[1]) ? kernel_of[1, r] : operation[1, r], shown(1, r, "time, us", "%.2f"),
            moved(r) ? sprintf("%.0f", moved(r)) : "-", shown(1, r, "DRAM, GB/s", "%.0f"),
            shown(1, r, "DRAM, % of peak", "%.1f%%"), dominating[1, r] == "" ? "-" : dominating[1, r],
            shown(1, r, "stall's share, %", "%.0f%%"), shown(1, r, "occupancy, %", "%.0f%%"),
            shown(1, r, "of at most, %", "%.0f%%"), shown(1, r, "registers", "%d"), shown(1, r, "local accesses", "%d")
    print ""
}

# Prints a line of the checklist: what it asks for, and where that is not so.
function check(asked, wrong)
{
    printf "%-4s %s%s\n", wrong == "" ? "ok" : "NOT", asked, wrong == "" ? "" : ": " wrong
    faults += wrong != ""
}

function and_so(wrong, next_one)
{
    return wrong == "" ? next_one : wrong ", " next_one
}

function check_phases(r, wrong)
{
    for (r = 1; r <= planned[1] || r <= rows[1]; r++)
        if (r > planned[1])
            wrong = and_so(wrong, kernel_of[1, r] " after the last")
        else if (r > rows[1])
            wrong = and_so(wrong, "nothing of " operation[1, r])
        else if (kernel_of[1, r] != expected_kernel[1, r])
            wrong = and_so(wrong, kernel_of[1, r] " for " operation[1, r])
    if (planned[1] == 0)
        wrong = "no plan"
    check("phases: each operation is its one kernel, " planned[1] + 0 " in this order", wrong)
}

function check_figures(r, copy, bandwidth, stall, spills, occupancy, large)
{
    for (r = 1; r <= rows[1]; r++)
        if (kind[1, r] == "copy")
            copy = moved(r)
    for (r = 1; r <= rows[1]; r++) {
        if (!has[1, r, "local accesses"] || figure[1, r, "local accesses"] > 0)
            spills = and_so(spills, operation[1, r] " " shown(1, r, "local accesses", "%d"))
        if (kind[1, r] != "large")
            continue
        large++
        if (copy == 0 || moved(r) < 0.8 * copy)
            bandwidth = and_so(bandwidth, operation[1, r] sprintf(" %.2f", copy ? moved(r) / copy : 0))
        if (dominating[1, r] != "long_scoreboard")
            stall = and_so(stall, operation[1, r] " " (dominating[1, r] == "" ? "-" : dominating[1, r]))
        if (!has[1, r, "of at most, %"] || figure[1, r, "occupancy, %"] < 0.6 * figure[1, r, "of at most, %"])
            occupancy = and_so(occupancy, operation[1, r] " " shown(1, r, "occupancy, %", "%.0f") " of " \
                                              shown(1, r, "of at most, %", "%.0f"))
    }
    if (!large)
        bandwidth = stall = occupancy = "no large operation"
    check("bandwidth: large ones move at least 0.80 of the copy kernel's " sprintf("%.0f GB/s", copy), bandwidth)
    check("stalls: large ones wait for loads from memory most (long scoreboard)", stall)
    check("spills: no kernel reads or writes local memory", spills)
    check("occupancy: large ones reach at least 0.60 of what registers and blocks allow", occupancy)
}

# Names a kernel by its operation, or by its name and how many kernels of that name came before.
function row_name(f, r)
{
    if (r <= planned[f])
        return operation[f, r]
    return kernel_of[f, r] " " ++named[f, kernel_of[f, r]]
}

function compare(r, name, names, n, k)
{
    n = split("time, us|DRAM, GB/s|DRAM, % of peak|stall's share, %|long scoreboard, %|occupancy, %|of at most, %|" \
              "registers|local accesses", names, "|")
    for (r = 1; r <= rows[2]; r++)
        row_of[row_name(2, r)] = r
    printf "%-36s %-20s %12s %12s %9s\n", "", "", "A", "B", "change"
    for (r = 1; r <= rows[1]; r++) {
        name = row_name(1, r)
        if (!row_of[name]) {
            printf "%-36s in A only\n", name
            continue
        }
        for (k = 1; k <= n; k++)
            compare_figure(k == 1 ? name : "", names[k], r, row_of[name])
        if (dominating[1, r] != dominating[2, row_of[name]])
            printf "%-36s %-20s %s, then %s\n", "", "dominating stall", dominating[1, r], dominating[2, row_of[name]]
        delete row_of[name]
    }
    for (name in row_of)
        if (row_of[name])
            printf "%-36s in B only\n", name
}

function compare_figure(label, name, a, b, before, after)
{
    if (!has[1, a, name] && !has[2, b, name])
        return
    before = figure[1, a, name]
    after = figure[2, b, name]
    printf "%-36s %-20s %12s %12s %9s\n", label, name, shown(1, a, name, "%.2f"), shown(2, b, name, "%.2f"),
        !has[1, a, name] || !has[2, b, name] || before == 0 ? (before == after ? "" : "-") : \
        sprintf("%+.1f%%", 100 * (after - before) / before)
}

END {
    if (what == "sass")
        exit print_sass()
    if (what == "cfg") {
        print kernel_count + 0 " kernels"
        exit kernel_count == 0
    }
    if (what == "compare") {
        if (!rows[1] || !rows[2]) {
            print "no kernel in " (rows[1] ? "B" : "A")
            exit 1
        }
        compare()
        exit 0
    }
    print_table()
    check_phases()
    check_figures()
    exit faults > 0
}
