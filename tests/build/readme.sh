#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: tests/build/readme.sh BUILD_DIR README.md PAGE...      `make test` calls it through tests/build/parts.sh
#
# Takes the pages apart. Of README.md, each ```c block becomes BUILD_DIR/snippet_N.c, which compiles by itself: a block
# without main() is put into a function whose parameters are what such fragments take for granted. The first one is
# also BUILD_DIR/store.h. The blocks of another page, LAYOUTS.md for example, are put together in BUILD_DIR/layouts.h.
# BUILD_DIR/named lists what all texts name, one per line: command (of cc), program (with arguments), target (of make),
# file, symbol (of the headers), preset.

build=$1
shift
awk -v build="$build" '
function add(kind, what)
{
    if (!((kind, what) in seen))
        print kind, what >(build "/named")
    seen[kind, what] = 1
}

# Takes a code span or an indented line. Commands end where two spaces follow.
function command(text,    n, words, i)
{
    if (text ~ /^cc /)
        add("command", text)
    if (text ~ /^build\/[^ ]+ [^ ]/)
        add("program", text)
    if (text ~ /^"[a-z0-9_]+"$/)
        add("preset", substr(text, 2, length(text) - 2))
    sub(/  .*/, "", text)
    gsub(/, make /, " ", text)
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
        else if (words[i] ~ /^(examples|tests)\/|.\.(c|h|cu|cuh|py|sh|svg|txt|md)$/)
            add("file", words[i])
        else if (words[i] ~ /^(kvprim_[a-z0-9_]+|KVPRIM_[A-Z0-9_]+)$/)
            add("symbol", words[i])
    }
}

BEGIN {
    given = "void fragment(void *k_cache, void *v_cache, void *k, void *v, const int32_t *slot, int64_t slots, " \
        "int64_t tokens)"
}

function finish(    page, source)
{
    block = "#line " start " \"" FILENAME "\"\n" block
    page = tolower(FILENAME)
    gsub(/.*\/|\.md$/, "", page)
    if (page == "readme" && ++snippets == 1)
        page = "store"
    if (page != "readme")
        printf "%s", block >(build "/" page ".h")
    if (FILENAME !~ /README/)
        return
    source = build "/snippet_" snippets ".c"
    if (block !~ /int main\(/)
        block = "#include \"kvprim_cuda.cuh\"\n#include \"kvprim_nccl.h\"\n#include <stdio.h>\n" \
            given ";\n" given "\n{\n" block "}\n"
    printf "%s", block >source
    close(source)
}

FNR == 1 && fenced { exit 1 }
/^```/ {
    if (fenced == "```c")
        finish()
    fenced = fenced ? "" : $0
    block = ""
    start = FNR + 1
    next
}
fenced { block = block $0 "\n" }
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
}' "$@"
