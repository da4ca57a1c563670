/* SPDX-License-Identifier: MIT */
/* These statuses may be ignored: no warning. */
#include "../../../kvprim.h"
#include "../../../kvprim_nccl.h"

void may_ignore(void);
void may_ignore(void)
{
    kvprim_fail(KVPRIM_OK, "-");
    kvprim_comm_destroy(NULL);
    kvprim_comm_abort(NULL);
}
