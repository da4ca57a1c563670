#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: tests/build/readme.sh README.md BUILD_DIR      `make test` calls it through tests/build/parts.sh
#
# Takes README.md apart. Each ```c block becomes BUILD_DIR/snippet_N.c, which compiles by itself: a block without main()
# is put into a function whose parameters are what such fragments take for granted. BUILD_DIR/named lists what the text
# names, one per line: command (of cc), program (with arguments), target (of make), file, symbol (of the headers).
# BUILD_DIR/layouts.h has the rows of the table of layouts that set fields.

awk -v build="$2" '
function add(kind, what)
{
    if (!((kind, what) in seen))
        print kind, what >(build "/named")
    seen[kind, what] = 1
}

# Takes a code span or an indented line. A command ends where two spaces follow or another command begins.
function command(text,    n, words, i)
{
    if (text ~ /^cc /)
        add("command", text)
    if (text ~ /^build\/[^ ]+ [^ ]/)
        add("program", text)
    sub(/  .*/, "", text)
    if (text !~ /^make /)
        return
    n = split(text, words, " ")
    for (i = 2; i <= n && words[i] ~ /^[a-z]/; i++)
        add("target", words[i])
}

function tokens(line,    n, words, i)
{
    n = split(line, words, /[^A-Za-z0-9_.\/-]+/)
    for (i = 1; i <= n; i++) {
        if (words[i] ~ /^build\/./)
            add("target", words[i])
        else if (words[i] ~ /^(examples|tests)\/|.\.(c|h|cu|cuh|py|sh|svg|txt)$/)
            add("file", words[i])
        else if (words[i] ~ /^(kvprim_[a-z0-9_]+|KVPRIM_[A-Z0-9_]+)$/)
            add("symbol", words[i])
    }
}

BEGIN {
    given = "void fragment(void *cache, int64_t slots, void *v_part, int64_t tokens, int64_t qkv_bytes, " \
        "kvprim_table k_cache, kvprim_table v_cache, kvprim_table k_new, kvprim_table v_new, uint32_t rejected, " \
        "kvprim_gather_desc gather, kvprim_status status, kvprim_comm comm, void *hidden, size_t count, " \
        "struct CUstream_st *stream)"
}

function finish(    source)
{
    source = build "/snippet_" ++snippets ".c"
    if (block !~ /int main\(/)
        block = "#include \"kvprim_cuda.cuh\"\n#include \"kvprim_nccl.h\"\n#include <stdio.h>\n" \
            given ";\n" given "\n{\n#line " start " \"README.md\"\n" block "}\n"
    printf "%s", block >source
    close(source)
}

/^```/ {
    if (fenced == "```c")
        finish()
    fenced = fenced ? "" : $0
    block = ""
    start = NR + 1
    next
}
fenced { block = block $0 "\n" }
!/^\|/ { in_layouts = 0 }
in_layouts && match($0, /^[^|]*\|[^|]*\| `\.[^`]*`/) {
    split($0, cells, "|")
    split(cells[3], spans, "`")
    print "LAYOUT(" ++layouts ", " spans[2] ")" >(build "/layouts.h")
}
/^\| your layout/ { in_layouts = 1 }
/^    / && !fenced { command(substr($0, 5)) }
!fenced {
    tokens($0)
    n = split($0, spans, "`")
    for (i = 2; i <= n; i += 2)
        command(spans[i])
}
END {
    if (fenced || !snippets)
        exit 1
}' "$1"
